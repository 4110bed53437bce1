"""What `stagecrew.session` does before Spark starts: properties, checks, refusals. No JVM runs here."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import stagecrew
from stagecrew import (
    ConfigurationError,
    JarMissing,
    Listener,
    ListenerError,
    ListenerNotPicklable,
    NotActive,
    UnsupportedSession,
    UnsupportedSpark,
    resource,
    session,
)

PLUGIN = "stagecrew.StagecrewPlugin"


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch):
    """No test here starts Spark, nor is changed by the environment of whoever runs it."""
    for name in ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_gateway", "_jvm", "_active_spark_context"):  # other tests of this process may have started it
        monkeypatch.setattr(pyspark.SparkContext, name, None)
    yield
    assert pyspark.SparkContext._gateway is None
    assert pyspark.SparkContext._active_spark_context is None


@pytest.fixture
def builder():
    """A session builder of its own: `SparkSession.builder` makes one for each use."""
    made = SparkSession.Builder()
    made._options = {}
    return made


class Pool(Listener):
    """Holds what it is given."""

    def __init__(self, dsn: Any = "a", **others: Any) -> None:
        self.dsn = dsn
        self.__dict__.update(others)


@resource
def pool(context, dsn, *, lock=None):
    """Yields."""
    yield dsn


# -- properties


def test_spark_conf_alone():
    """Two properties switch the plugin on; nothing else is set."""
    assert stagecrew.spark_conf() == {"spark.plugins": PLUGIN, "spark.jars": stagecrew.jar_path()}


def test_spark_conf_appends_and_never_replaces():
    """What was there stays, in its order and first; ours comes once."""
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


def test_the_jar_is_that_of_this_package():
    """It is one file beside the package."""
    path = Path(stagecrew.jar_path())
    assert path.is_file()
    assert path.parent == Path(stagecrew.__file__).parent / "jars"


def test_a_missing_jar(monkeypatch, builder):
    """The error says how to get it, and it comes from `configure`, not when the session starts."""
    monkeypatch.setattr(f"{session.jar_path.__module__}.__version__", "0.0.0+none")
    for call in (stagecrew.jar_path, stagecrew.spark_conf, lambda: stagecrew.configure(builder)):
        with pytest.raises(JarMissing, match=r"stagecrew 0\.0\.0\+none has no jar .*reinstall it .*or run `make jar`"):
            call()


DEFAULTS = """
# a comment
  ! another, as java.util.Properties has it
spark.plugins            com.example.A
spark.jars\t/one.jar
spark.with.equals=a=b
spark.with.blanks = c d
spark.with.colon: e
spark.extraJavaOptions   -Dx=y -Dz="a b"
spark.continued  f,\\
                 g
   spark.indented  h
spark.flag
spark.plugins            com.example.B
"""


def test_spark_defaults(tmp_path, monkeypatch):
    """It is read as Spark reads it: any of its separators, comments, continued lines; the last of a key wins."""
    (tmp_path / "spark-defaults.conf").write_text(DEFAULTS)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert session._spark_defaults() == {
        "spark.plugins": "com.example.B",
        "spark.jars": "/one.jar",
        "spark.with.equals": "a=b",
        "spark.with.blanks": "c d",
        "spark.with.colon": "e",
        "spark.extraJavaOptions": '-Dx=y -Dz="a b"',
        "spark.continued": "f,g",
        "spark.indented": "h",
        "spark.flag": "",
    }


def test_where_spark_defaults_lie(tmp_path, monkeypatch):
    """SPARK_CONF_DIR before SPARK_HOME/conf; none at all is no error."""
    assert session._spark_defaults() == {}
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.plugins of.home")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert session._spark_defaults() == {"spark.plugins": "of.home"}
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "nowhere"))
    assert session._spark_defaults() == {}


@pytest.fixture
def started(monkeypatch, builder, tmp_path):
    """Answers the options with which a configured builder would start Spark."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))

    class Started(Exception):  # noqa: N818
        """Stands for the start."""

    def start() -> None:
        raise Started

    def options(**arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(builder, "getOrCreate", start)
        with pytest.raises(Started):
            stagecrew.configure(builder, **arguments).getOrCreate()
        return dict(builder._options)

    return options


def test_configure_appends_to_the_builder(started, builder):
    """What the builder has before and what it is given after `configure` both stay."""
    builder.config("spark.plugins", "com.example.A").config("spark.jars", "/a.jar").config("spark.x", "y")
    assert started() == {
        "spark.plugins": f"com.example.A,{PLUGIN}",
        "spark.jars": f"/a.jar,{stagecrew.jar_path()}",
        "spark.x": "y",
    }


def test_configure_sees_what_comes_after_it(builder, monkeypatch):
    """The builder is answered, and options set on it afterwards count."""
    monkeypatch.setattr(builder, "getOrCreate", lambda: (_ for _ in ()).throw(RuntimeError("the start")))
    configured = stagecrew.configure(builder)
    assert configured is builder
    with pytest.raises(RuntimeError, match="the start"):
        configured.config("spark.plugins", "com.example.Late").getOrCreate()
    assert builder._options["spark.plugins"] == f"com.example.Late,{PLUGIN}"


def test_configure_appends_to_spark_defaults(started, tmp_path):
    """A setting of the builder would replace that of the file, so it is taken over."""
    (tmp_path / "spark-defaults.conf").write_text("spark.plugins\tof.file\nspark.jars = /file.jar\nspark.other z\n")
    assert started() == {"spark.plugins": f"of.file,{PLUGIN}", "spark.jars": f"/file.jar,{stagecrew.jar_path()}"}


def test_configure_with_jvm_listeners(started, builder):
    """They are added to those that the builder names."""
    builder.config("spark.stagecrew.jvmListeners", "a.A")
    assert started(jvm_listeners=["b.B", "a.A"])["spark.stagecrew.jvmListeners"] == "a.A,b.B"


def test_no_listener_gets_into_the_options(started):
    """A listener may hold a password: it is not in any property."""
    options = started(listeners=[pool("a-password"), Pool("a-password")])
    assert "password" not in repr(options)


# -- what is refused


def test_configure_refuses_a_session(monkeypatch):
    """It says that a builder is wanted, and why."""
    with pytest.raises(ConfigurationError, match=r"takes SparkSession\.builder, and this is a session that was built"):
        stagecrew.configure(SparkSession.__new__(SparkSession))


@pytest.mark.parametrize("wrong", [None, "local", SparkSession.Builder, object()])
def test_configure_refuses_what_is_no_builder(wrong):
    """It names the type of what it was given."""
    with pytest.raises(ConfigurationError, match=r"takes SparkSession\.builder, not \w+"):
        stagecrew.configure(wrong)


def connect_object(name: str) -> Any:
    """Something of Spark Connect, whose own modules need packages that need not be here."""
    return type(name, (), {"__module__": "pyspark.sql.connect.session"})()


def test_connect_is_refused():
    """A builder and a session of Spark Connect get the error that says what to change."""
    for call in (stagecrew.configure, stagecrew.crew):
        with pytest.raises(UnsupportedSession, match=r"Spark Connect.*Take away SPARK_REMOTE.*give a master instead"):
            call(connect_object("SparkSession"))


@pytest.mark.parametrize(
    ("option", "variable"),
    [
        (("spark.remote", "sc://localhost"), None),
        (("spark.api.mode", "CONNECT"), None),
        (None, ("SPARK_REMOTE", "sc://localhost")),
        (None, ("SPARK_CONNECT_MODE_ENABLED", "1")),
        (None, ("SPARK_API_MODE", "connect")),
    ],
)
def test_a_builder_that_would_make_a_connect_session(builder, monkeypatch, option, variable):
    """It is refused when it starts, for each way in which Spark is told to use Connect."""
    if option:
        builder.config(*option)
    if variable:
        monkeypatch.setenv(*variable)
    monkeypatch.setattr(builder, "getOrCreate", lambda: pytest.fail("Spark must not start"))
    with pytest.raises(UnsupportedSession, match="Spark Connect"):
        stagecrew.configure(builder).getOrCreate()


@pytest.mark.parametrize("version", ["4.2.9", "4.30.0", "4.4.0", "3.5.1"])
def test_another_spark_is_refused(builder, monkeypatch, version):
    """The error names both versions and what to install."""
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(
        UnsupportedSpark, match=rf"built for Spark 4\.3, and pyspark {version} is installed: `pip install"
    ):
        stagecrew.configure(builder)


def test_a_running_context_without_the_plugin(builder, monkeypatch):
    """`getOrCreate` refuses: Spark would ignore the plugin."""
    running = SimpleNamespace(_jvm=None, _jsc=None)
    monkeypatch.setattr(builder, "getOrCreate", lambda: pytest.fail("Spark must not start"))
    configured = stagecrew.configure(builder)
    with monkeypatch.context() as patched:
        patched.setattr(pyspark.SparkContext, "_active_spark_context", running)
        with pytest.raises(NotActive, match=r"a SparkContext runs already, without stagecrew.*Stop this session"):
            configured.getOrCreate()


def test_is_active_and_crew_without_a_session():
    """Nothing that is no session is active, and `crew` names what it was given."""
    assert not stagecrew.is_active(None)
    assert not stagecrew.is_active(object())
    with pytest.raises(ConfigurationError, match=r"stagecrew\.crew takes a SparkSession, not NoneType"):
        stagecrew.crew(None)


# -- listeners


def test_checked_answers_what_it_was_given():
    """Any iterable, in its order."""
    listeners = [Pool(), pool("a"), stagecrew.LoggingContext()]
    assert session.checked(iter(listeners)) == tuple(listeners)
    assert session.checked(()) == ()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (Pool, r"^Pool is a class; register an instance: listeners=\[Pool\(\.\.\.\)\]"),
        (pool, r"^pool is a resource that was not called; register listeners=\[pool\(\.\.\.\)\]"),
        ("m:orders", r"^'m:orders' is no stagecrew\.Listener; subclass Listener or decorate a generator with"),
        (None, r"^None is no stagecrew\.Listener"),
        (int, r"^<class 'int'> is no stagecrew\.Listener"),
    ],
)
def test_what_is_no_listener(wrong, text, builder):
    """The error says what to write instead, from `checked` and from `configure`; the good ones before do not hide it."""
    with pytest.raises(ListenerError, match=text):
        session.checked([Pool(), wrong])
    with pytest.raises(ListenerError, match=text):
        stagecrew.configure(builder, listeners=[Pool(), wrong])


@pytest.mark.parametrize(
    ("listener", "texts"),
    [
        (
            Pool(lock=threading.Lock()),
            ["listener 'Pool'", "its attribute 'lock' is a lock", "Create such things in open()"],
        ),
        (Pool(threading.Lock()), ["listener 'Pool'", "its attribute 'dsn' is a lock"]),
        (pool(threading.Lock()), ["listener 'pool'", "its argument 1 is a lock"]),
        (pool("a-password", lock=threading.Lock()), ["listener 'pool'", "its argument 'lock' is a lock"]),
    ],
)
def test_a_listener_that_cannot_be_pickled(listener, texts, builder):
    """The error names it and the attribute or argument, shows no value, and has Python's own error as its cause."""
    for call in (
        lambda: session.pickled([Pool(), listener]),
        lambda: stagecrew.configure(builder, listeners=[listener]),
    ):
        with pytest.raises(ListenerNotPicklable) as raised:
            call()
        for text in texts:
            assert text in str(raised.value)
        assert "a-password" not in str(raised.value)
        assert isinstance(raised.value.__cause__, TypeError)


def test_a_named_listener_that_cannot_be_pickled():
    """Its own name is used."""
    listener = Pool(threading.Lock())
    listener.name = "orders"
    with pytest.raises(ListenerNotPicklable, match="listener 'orders' cannot be pickled"):
        session.pickled([listener])


def test_an_unpicklable_without_a_culprit():
    """When no attribute is to blame, the error says only what Python said."""

    class Refuses(Listener):
        def __getstate__(self):
            raise RuntimeError("not today")

    with pytest.raises(
        ListenerNotPicklable, match=r"listener '.*Refuses' cannot be pickled \(RuntimeError: not today\)"
    ):
        session.pickled([Refuses()])


# -- what the plugin refuses when Spark starts


class JavaError:
    """As py4j shows an exception of the JVM."""

    def __init__(self, message: str | None, cause: JavaError | None = None) -> None:
        self.getMessage, self.getCause = lambda: message, lambda: cause


def refused(java: JavaError | None, text: str = "py4j's text") -> Exception:
    """What a user sees of it."""
    error = RuntimeError(text)
    error.java_exception = java
    return session._refusal(error)


def test_refusals_of_the_plugin():
    """The innermost message of ours becomes an error of ours; everything else stays as it is."""
    ours = refused(JavaError("outer", JavaError("stagecrew refuses spark.python.daemon.module=x")))
    assert type(ours) is ConfigurationError
    assert str(ours) == "stagecrew refuses spark.python.daemon.module=x"
    assert type(refused(JavaError("this stagecrew is built for Spark 4.3"))) is UnsupportedSpark
    assert str(refused(JavaError("port in use"))) == "py4j's text"
    assert str(refused(JavaError("java.lang.ClassNotFoundException: stagecrew.X"))) == "py4j's text"
    assert str(refused(JavaError(None))) == "py4j's text"
    assert type(refused(None, "stagecrew is unhappy")) is ConfigurationError


def test_listeners_of_a_running_application_cannot_change():
    """Those that it has are accepted, also made anew; others are named with what to do."""
    crew = session.Crew.__new__(session.Crew)
    crew._registered = (pool("a"),)
    crew.already_has((pool("a"),))
    crew.already_has(())
    with pytest.raises(
        ConfigurationError, match=r"not among them: pool, Pool\. Stop the session first, or use a topology"
    ):
        crew.already_has((pool("a"), pool("b"), Pool()))
