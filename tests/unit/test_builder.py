"""`stagecrew.session.builder` before Spark starts: properties, checks and refusals. No JVM runs here."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

import stagecrew
from stagecrew import Listener, resource
from stagecrew.errors import ConfigurationError, ListenerError, NotActive
from stagecrew.session import builder as session_builder
from stagecrew.session import registration
from stagecrew.session.crew import Crew

PLUGIN = "stagecrew.StagecrewPlugin"


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch):
    """No test in this module starts Spark or depends on the environment."""
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONNECT_MODE", "SPARK_API_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_gateway", "_jvm", "_active_spark_context"):  # other tests may have started Spark in this process
        monkeypatch.setattr(pyspark.SparkContext, name, None)
    yield
    assert pyspark.SparkContext._gateway is None
    assert pyspark.SparkContext._active_spark_context is None


@pytest.fixture
def builder():
    """A new session builder, as each access to `SparkSession.builder` creates one."""
    made = SparkSession.Builder()
    made._options = {}
    return made


class Pool(Listener):
    """A listener that keeps its arguments as attributes."""

    def __init__(self, dsn: Any = "a", **others: Any) -> None:
        self.dsn = dsn
        self.__dict__.update(others)


@resource
def pool(context, dsn, *, lock=None):
    """A resource that yields its argument."""
    yield dsn


# -- Properties


def test_spark_conf_without_arguments():
    """`spark_conf` returns the two properties that enable the plugin, and nothing else."""
    assert stagecrew.spark_conf() == {"spark.plugins": PLUGIN, "spark.jars": stagecrew.jar_path()}


def test_spark_conf_appends_and_never_replaces():
    """`spark_conf` keeps existing values first and in their order, and adds stagecrew's value once."""
    conf = stagecrew.spark_conf(
        plugins=" com.example.A , com.example.B,", jars="/a.jar", listeners=["m:one", "m:two"], jvm_listeners=["x.Y"]
    )
    assert conf == {
        "spark.plugins": f"com.example.A,com.example.B,{PLUGIN}",
        "spark.jars": f"/a.jar,{stagecrew.jar_path()}",
        "spark.stagecrew.listeners": "m:one,m:two",
        "spark.stagecrew.jvmListeners": "x.Y",
    }
    again = stagecrew.spark_conf(plugins=conf["spark.plugins"], jars=conf["spark.jars"])
    assert again == {key: conf[key] for key in again}
    assert stagecrew.spark_conf(plugins=f"{PLUGIN},com.example.B")["spark.plugins"] == f"{PLUGIN},com.example.B"


def test_the_jar_is_in_the_package():
    """The jar is a file in the package's folder `jars`."""
    path = Path(stagecrew.jar_path())
    assert path.is_file()
    assert path.parent == Path(stagecrew.__file__).parent / "jars"


def test_a_missing_jar(monkeypatch, builder):
    """Without the jar, `jar_path`, `spark_conf` and `configure` raise an error that says how to get the jar."""
    monkeypatch.setattr(f"{session_builder.jar_path.__module__}.__version__", "0.0.0+none")
    for call in (stagecrew.jar_path, stagecrew.spark_conf, lambda: stagecrew.configure(builder)):
        with pytest.raises(
            ConfigurationError, match=r"stagecrew 0\.0\.0\+none has no jar: reinstall it .* checkout: run `make jar`"
        ):
            call()


class Jvm:
    """A fake JVM with the parts that `configure` uses: Spark's default settings and a class loader."""

    def __init__(self) -> None:
        self.jvm_conf: dict[str, str] = {}
        self.launched: list[dict[str, str]] = []
        self.loaded = True
        self.added: list[str] = []
        file = SimpleNamespace(File=lambda path: SimpleNamespace(toURI=lambda: SimpleNamespace(toURL=lambda: path)))
        loader = SimpleNamespace(loadClass=self.load, addURL=self.add)
        thread = SimpleNamespace(currentThread=lambda: SimpleNamespace(getContextClassLoader=lambda: loader))
        self.java = SimpleNamespace(io=file, lang=SimpleNamespace(Thread=thread))

    def SparkConf(self, defaults: bool) -> dict[str, str]:
        assert defaults
        return self.jvm_conf

    def load(self, name: str) -> None:
        if not self.loaded:
            raise Py4JError(name)

    def add(self, path: str) -> None:
        self.added.append(path)
        self.loaded = True


@pytest.fixture
def jvm(monkeypatch):
    """A fake JVM in place of the one that PySpark would start for a session."""
    made = Jvm()

    def ensure(conf: pyspark.SparkConf) -> None:
        made.launched.append(dict(conf.getAll()))
        monkeypatch.setattr(pyspark.SparkContext, "_gateway", made)
        monkeypatch.setattr(pyspark.SparkContext, "_jvm", made)

    monkeypatch.setattr(pyspark.SparkContext, "_ensure_initialized", ensure)
    yield made
    for name in ("_gateway", "_jvm"):
        monkeypatch.setattr(pyspark.SparkContext, name, None)


class Started(Exception):
    """Replaces the start of Spark."""


@pytest.fixture
def started(monkeypatch, builder, jvm):
    """A function that returns the options with which a configured builder would start Spark."""

    def start() -> None:
        raise Started

    def options(**arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(builder, "getOrCreate", start)
        with pytest.raises(Started):
            stagecrew.configure(builder, **arguments).getOrCreate()
        return dict(builder._options)

    return options


def test_configure_appends_to_the_builder(started, builder):
    """`configure` keeps the options that were set on the builder, and appends stagecrew's values to them."""
    builder.config("spark.plugins", "com.example.A").config("spark.jars", "/a.jar").config("spark.x", "y")
    assert started() == {
        "spark.plugins": f"com.example.A,{PLUGIN}",
        "spark.jars": f"/a.jar,{stagecrew.jar_path()}",
        "spark.x": "y",
    }


def test_configure_uses_later_options(builder, jvm, monkeypatch):
    """`configure` returns the builder, and options that are set on it later take effect."""
    monkeypatch.setattr(builder, "getOrCreate", lambda: (_ for _ in ()).throw(RuntimeError("the start")))
    configured = stagecrew.configure(builder)
    assert configured is builder
    with pytest.raises(RuntimeError, match="the start"):
        configured.config("spark.plugins", "com.example.Late").getOrCreate()
    assert builder._options["spark.plugins"] == f"com.example.Late,{PLUGIN}"


def test_the_jvm_starts_with_the_options_of_the_builder(started, builder, jvm):
    """The JVM starts with the builder's options, such as packages and memory, and without stagecrew's own values."""
    builder.config("spark.jars.packages", "org.example:a:1").config("spark.driver.memory", "2g")
    started()
    assert jvm.launched == [{"spark.jars.packages": "org.example:a:1", "spark.driver.memory": "2g"}]
    started()
    assert len(jvm.launched) == 1


def test_configure_appends_to_the_conf_of_the_jvm(started, builder, jvm):
    """`configure` merges the builder's values with those from spark-submit and spark-defaults.conf, each entry once.

    A value that is set on the builder would replace them.
    """
    jvm.jvm_conf |= {
        "spark.plugins": "of.submit, of.builder",
        "spark.jars": "file:///a%20b.jar,hdfs://h/c.jar,file:///builder.jar",
        "spark.stagecrew.jvmListeners": "a.A",
    }
    builder.config("spark.plugins", "of.builder").config("spark.jars", "/builder.jar,/a b.jar,/other.jar")
    options = started(jvm_listeners=["b.B", "a.A"])
    assert options["spark.plugins"] == f"of.submit,of.builder,{PLUGIN}"
    jars = f"file:///a%20b.jar,hdfs://h/c.jar,file:///builder.jar,/other.jar,{stagecrew.jar_path()}"
    assert options["spark.jars"] == jars
    assert options["spark.stagecrew.jvmListeners"] == "a.A,b.B"


def test_the_jar_is_not_added_twice(started, jvm):
    """The jar is added once, even if `spark-submit --jars $(stagecrew jar)` has already added it."""
    jvm.jvm_conf |= {"spark.jars": Path(stagecrew.jar_path()).as_uri(), "spark.plugins": PLUGIN}
    options = started()
    assert (options["spark.jars"], options["spark.plugins"]) == (jvm.jvm_conf["spark.jars"], PLUGIN)


@pytest.mark.parametrize("loaded", [True, False])
def test_the_jar_is_loaded_into_a_running_jvm(started, jvm, loaded):
    """The jar is loaded into a running JVM before Spark starts, but only if the JVM was started without it."""
    jvm.loaded = loaded
    started()
    assert jvm.added == ([] if loaded else [stagecrew.jar_path()])


def test_create_is_configured_too(builder, jvm, monkeypatch):
    """`create()` on a configured builder sets the same options as `getOrCreate()`."""

    def start() -> None:
        raise Started

    monkeypatch.setattr(builder, "create", start)
    with pytest.raises(Started):
        stagecrew.configure(builder).create()
    assert builder._options["spark.plugins"] == PLUGIN


def test_configure_with_jvm_listeners(started, builder):
    """JVM listeners are added to those that the builder already names."""
    builder.config("spark.stagecrew.jvmListeners", "a.A")
    assert started(jvm_listeners=["b.B", "a.A"])["spark.stagecrew.jvmListeners"] == "a.A,b.B"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("a.B", r"jvm_listeners='a\.B' is a string; write a list: jvm_listeners=\['a\.B'\]"),
        ([1], "1 in jvm_listeners is"),
    ],
)
def test_jvm_listeners_must_be_a_list_of_names(builder, wrong, text):
    """A string, or a list that contains anything but strings, is refused. The error says what to write instead."""
    with pytest.raises(ConfigurationError, match=text):
        stagecrew.configure(builder, jvm_listeners=wrong)
    crew = Crew.__new__(Crew)
    crew.connection, crew.topologies, crew.commit_log = SimpleNamespace(require_running=lambda: None), None, None
    with pytest.raises(ConfigurationError, match=text):
        crew.topology("t", jvm_listeners=wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("m:orders", r"^listeners='m:orders' is a string; register instances: listeners=\[\.\.\.\]"),
        (Pool("a"), r"^listeners is a single listener, Pool; register a list: listeners=\[\.\.\.\]"),
        (Pool, r"^Pool is a class; register an instance"),
        (pool, r"^pool is a resource that was not called"),
    ],
)
def test_listeners_must_be_a_list(wrong, text, builder):
    """A string, or a listener that is not in a list, is refused. The error says what to write instead."""
    with pytest.raises(ListenerError, match=text):
        stagecrew.configure(builder, listeners=wrong)


def test_listeners_are_not_in_the_options(started):
    """No property contains the listeners, because a listener can contain a password."""
    options = started(listeners=[pool("a-password"), Pool("a-password")])
    assert "password" not in repr(options)


# -- Refusals


def test_configure_refuses_a_session(monkeypatch):
    """The error says that `configure` takes a builder, and that the argument is a running session."""
    with pytest.raises(ConfigurationError, match=r"takes SparkSession\.builder, but this is a running session"):
        stagecrew.configure(SparkSession.__new__(SparkSession))


@pytest.mark.parametrize("wrong", [None, "local", SparkSession.Builder, object()])
def test_configure_refuses_anything_but_a_builder(wrong):
    """`configure` refuses anything but a builder. The error names the type of the argument."""
    with pytest.raises(ConfigurationError, match=r"takes SparkSession\.builder, not \w+"):
        stagecrew.configure(wrong)


def connect_object(name: str) -> Any:
    """Returns an object that looks like one of Spark Connect, whose real modules need additional packages."""
    return type(name, (), {"__module__": "pyspark.sql.connect.session"})()


def test_connect_is_refused():
    """`configure` and `crew` refuse objects of Spark Connect. The error says what to change."""
    for call in (stagecrew.configure, stagecrew.crew):
        with pytest.raises(ConfigurationError, match=r"Spark Connect.*Remove SPARK_REMOTE.*set a master instead"):
            call(connect_object("SparkSession"))


@pytest.mark.parametrize(
    ("option", "variable"),
    [
        (("spark.remote", "sc://localhost"), None),
        (("spark.api.mode", "CONNECT"), None),
        (None, ("SPARK_REMOTE", "sc://localhost")),
        (None, ("SPARK_CONNECT_MODE_ENABLED", "1")),
        (None, ("SPARK_API_MODE", "connect")),
        (None, ("SPARK_CONNECT_MODE", "1")),
    ],
)
def test_a_builder_that_would_create_a_connect_session(builder, monkeypatch, option, variable):
    """A builder does not start if any setting would make Spark use Connect."""
    if option:
        builder.config(*option)
    if variable:
        monkeypatch.setenv(*variable)
    for name in ("getOrCreate", "create"):
        monkeypatch.setattr(builder, name, lambda: pytest.fail("Spark must not start"))
        with pytest.raises(ConfigurationError, match="Spark Connect"):
            getattr(stagecrew.configure(builder), name)()


@pytest.mark.parametrize("version", ["4.30.0", "4.4.0", "5.0.0", "3.5.1"])
def test_another_version_of_spark_is_refused(builder, monkeypatch, version):
    """`configure` refuses other Spark versions. The error names the versions and what to install."""
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(
        ConfigurationError, match=rf"supports Spark 4\.0 to 4\.3, and this is Spark {version}: `pip ins"
    ):
        stagecrew.configure(builder)


def test_spark_3_is_refused_although_it_lacks_names():
    """The error of `configure` is the same if PySpark lacks a name that stagecrew imports from Spark 4."""
    script = """
import pyspark.util
del pyspark.util.default_api_mode
pyspark.__version__ = "3.5.9"
import stagecrew
from pyspark.sql import SparkSession
try:
    stagecrew.configure(SparkSession.builder)
except stagecrew.errors.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("stagecrew supports Spark 4.0 to 4.3, and this is Spark 3.5.9:")


def test_a_running_context_without_the_plugin(builder, monkeypatch):
    """`getOrCreate` refuses to use a running SparkContext without the plugin, because Spark would ignore the plugin."""
    running = SimpleNamespace(_jvm=None, _jsc=None)
    monkeypatch.setattr(builder, "getOrCreate", lambda: pytest.fail("Spark must not start"))
    configured = stagecrew.configure(builder)
    with monkeypatch.context() as patched:
        patched.setattr(pyspark.SparkContext, "_active_spark_context", running)
        with pytest.raises(NotActive, match=r"a SparkContext is already running without stagecrew.*Stop this session"):
            configured.getOrCreate()


def test_is_active_and_crew_without_a_session():
    """For an object that is not a session, `is_active` returns False and `crew` raises an error that names its type."""
    assert not stagecrew.is_active(None)
    assert not stagecrew.is_active(object())
    with pytest.raises(ConfigurationError, match=r"stagecrew\.crew takes a SparkSession, not NoneType"):
        stagecrew.crew(None)


# -- Listeners


def test_checked_returns_its_listeners():
    """`checked` accepts any iterable of listeners, and returns them in the same order."""
    listeners = [Pool(), pool("a"), stagecrew.LoggingContext()]
    assert registration.checked(iter(listeners)) == tuple(listeners)
    assert registration.checked(()) == ()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (Pool, r"^Pool is a class; register an instance: listeners=\[Pool\(\.\.\.\)\]"),
        (pool, r"^pool is a resource that was not called; register listeners=\[pool\(\.\.\.\)\]"),
        ("m:orders", r"^'m:orders' is not a stagecrew\.Listener; subclass Listener, or decorate a generator with"),
        (None, r"^None is not a stagecrew\.Listener"),
        (int, r"^<class 'int'> is not a stagecrew\.Listener"),
    ],
)
def test_anything_but_listeners_is_refused(wrong, text, builder):
    """The errors of `checked` and `configure` say what to write instead, even if valid listeners come first."""
    with pytest.raises(ListenerError, match=text):
        registration.checked([Pool(), wrong])
    with pytest.raises(ListenerError, match=text):
        stagecrew.configure(builder, listeners=[Pool(), wrong])


@pytest.mark.parametrize(
    ("listener", "texts"),
    [
        (
            Pool(lock=threading.Lock()),
            ["listener 'Pool'", "its attribute 'lock' is a lock", "Create such objects in open()"],
        ),
        (Pool(threading.Lock()), ["listener 'Pool'", "its attribute 'dsn' is a lock"]),
        (pool(threading.Lock()), ["listener 'pool'", "its argument 1 is a lock"]),
        (pool("a-password", lock=threading.Lock()), ["listener 'pool'", "its argument 'lock' is a lock"]),
    ],
)
def test_a_listener_that_cannot_be_pickled(listener, texts, builder):
    """The error names the listener and its attribute or argument, but no value. Its cause is Python's own error."""
    for call in (
        lambda: registration.pickled([Pool(), listener]),
        lambda: stagecrew.configure(builder, listeners=[listener]),
    ):
        with pytest.raises(ListenerError) as raised:
            call()
        for text in texts:
            assert text in str(raised.value)
        assert "a-password" not in str(raised.value)
        assert isinstance(raised.value.__cause__, TypeError)


def test_a_named_listener_that_cannot_be_pickled():
    """If a listener has a name, the error uses this name instead of the class."""
    listener = Pool(threading.Lock())
    listener.name = "orders"
    with pytest.raises(ListenerError, match="listener 'orders' cannot be pickled"):
        registration.pickled([listener])


def test_a_listener_that_cannot_be_pickled_for_an_unknown_reason():
    """If no attribute is the reason, the error contains the listener's class and Python's own message."""

    class Refuses(Listener):
        def __getstate__(self):
            raise RuntimeError("not today")

    with pytest.raises(ListenerError, match=r"listener '.*Refuses' cannot be pickled \(RuntimeError: not today\)"):
        registration.pickled([Refuses()])


# -- Refusals by the plugin when Spark starts


class JavaError:
    """A Java exception, as py4j represents it."""

    def __init__(
        self, message: str | None, cause: JavaError | None = None, class_name: str = "java.lang.Exception"
    ) -> None:
        self.getMessage, self.getCause = lambda: message, lambda: cause
        self.getClass = lambda: SimpleNamespace(getName=lambda: class_name)


def error_seen_by_user(java: JavaError | None, text: str = "py4j's text") -> Exception:
    """Returns the error that a user sees when the start of Spark fails with this Java exception."""
    error = RuntimeError(text)
    error.java_exception = java
    return session_builder._as_our_error(error)


def test_refusals_by_the_plugin_become_configuration_errors():
    """If the message of the innermost cause mentions stagecrew, it becomes a ConfigurationError.

    All other errors stay unchanged.
    """
    ours = error_seen_by_user(JavaError("outer", JavaError("stagecrew refuses spark.python.daemon.module=x")))
    assert type(ours) is ConfigurationError
    assert str(ours) == "stagecrew refuses spark.python.daemon.module=x"
    assert type(error_seen_by_user(JavaError("this stagecrew is built for Spark 4.3"))) is ConfigurationError
    assert str(error_seen_by_user(JavaError("port in use"))) == "py4j's text"
    assert str(error_seen_by_user(JavaError(None))) == "py4j's text"
    assert type(error_seen_by_user(None, "stagecrew is unhappy")) is ConfigurationError


def test_a_missing_class_is_not_a_refusal():
    """A ClassNotFoundException stays unchanged even if the name of the missing class contains "stagecrew"."""
    missing = JavaError("com.example.stagecrew.Mine", class_name="java.lang.ClassNotFoundException")
    assert str(error_seen_by_user(missing)) == "py4j's text"
    assert str(error_seen_by_user(JavaError("outer", missing))) == "py4j's text"
    assert type(error_seen_by_user(JavaError("stagecrew says: ClassNotFoundException"))) is ConfigurationError


def test_a_refusal_in_a_later_session():
    """Refusals are also recognized in PySpark's own errors, which it raises from the second session on."""
    error = RuntimeError("pyspark's text")
    error._origin = JavaError("outer", JavaError("stagecrew refuses"))
    assert str(session_builder._as_our_error(error)) == "stagecrew refuses"


@pytest.mark.parametrize(("text", "same"), [("port in use", True), ("stagecrew refuses", False)])
def test_an_error_is_never_its_own_cause(builder, jvm, monkeypatch, text, same):
    """Other errors are raised unchanged. A refusal has the original error as its cause."""
    original = RuntimeError(text)
    monkeypatch.setattr(builder, "getOrCreate", lambda: (_ for _ in ()).throw(original))
    with pytest.raises((RuntimeError, ConfigurationError)) as raised:
        stagecrew.configure(builder).getOrCreate()
    assert (raised.value is original) == same
    assert raised.value.__cause__ is (None if same else original)


def test_listeners_of_a_running_application_cannot_change():
    """A running application accepts only listeners that it has, or that equal one of them, and coordinators by name.

    The error names the others and says what to do.
    """
    crew = Crew.__new__(Crew)
    crew._registered = (pool("a"),)
    crew.application = types.SimpleNamespace(coordinators={"counter": None})
    crew._require_registered((pool("a"),), ["counter"])
    crew._require_registered((), ())
    with pytest.raises(
        ConfigurationError, match=r"it does not have: pool, Pool\. Stop the session first, or use a topology"
    ):
        crew._require_registered((pool("a"), pool("b"), Pool()), ())
    with pytest.raises(ConfigurationError, match=r"coordinators cannot change; it does not have: other\. Stop the"):
        crew._require_registered((), ["counter", "other"])


def test_threads_that_ask_for_a_crew_at_the_same_time_get_the_same_one(monkeypatch):
    """All threads get one crew for a session, even if they are the first to ask for it, at the same time."""

    class SlowFacade:
        def version(self):
            time.sleep(0.01)
            return stagecrew.__version__

    session = object.__new__(SparkSession)
    session._sc = types.SimpleNamespace()
    monkeypatch.setattr(session_builder, "_facade", lambda context: SlowFacade())
    monkeypatch.setattr(session_builder, "Crew", lambda context, facade: object())
    with ThreadPoolExecutor(8) as pool:
        crews = set(pool.map(lambda _: stagecrew.crew(session), range(8)))
    assert len(crews) == 1
