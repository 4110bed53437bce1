"""From a session builder to a crew: switching the plugin on, and talking to it on the driver."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.util import default_api_mode

from stagecrew._version import __version__
from stagecrew.conf import KEYS, PLUGIN, parse_bytes, parse_seconds
from stagecrew.errors import (
    ConfigurationError,
    NotActive,
    UnsupportedSession,
    UnsupportedSpark,
    VersionMismatch,
)
from stagecrew.frames import encode
from stagecrew.jar import SPARK_LINE, jar_path, joined, spark_conf
from stagecrew.listeners import Listener, listener_name
from stagecrew.marks import Marks
from stagecrew.registration import checked, class_names, pickled
from stagecrew.topology import Topology, TopologyReport

if TYPE_CHECKING:
    from stagecrew.coordination.channel import DriverChannel
    from stagecrew.coordination.host import Host

__all__ = ["Crew", "configure", "crew", "is_active", "jar_path", "spark_conf"]

Builder = TypeVar("Builder")

_REMEDY: Final = (
    "Stop this session and build it again with `stagecrew.configure(SparkSession.builder).getOrCreate()`, or start the "
    f"application with `spark-submit --jars $(stagecrew jar) --conf spark.plugins={PLUGIN}`."
)


def configure(builder: Builder, listeners: Iterable[Listener] = (), jvm_listeners: Iterable[str] = ()) -> Builder:
    """Switches stagecrew on for the session that this builder makes, with listeners for the whole application.

    Answers the builder: `stagecrew.configure(SparkSession.builder, listeners=[orders]).getOrCreate()`, or `.create()`. It
    appends to `spark.plugins`, `spark.jars` and `spark.stagecrew.jvmListeners`, never replaces: to those of the builder, also
    when they are set on it afterwards, and to those with which the JVM was started (`spark-submit`, PYSPARK_SUBMIT_ARGS,
    `spark.jars.packages`, and spark-defaults.conf, of which a JVM that starts here takes what the builder has not). In an
    application that `spark-submit` started it works without `--jars`. In a local master the workers run the driver's own
    interpreter when neither PYSPARK_PYTHON nor `spark.pyspark.python` is set.

    It does **not** start Spark. `getOrCreate` and `create` raise `NotActive` when a SparkContext runs already without the
    plugin: Spark would silently ignore it. With the plugin, they answer the running session, or a new one beside it, when
    `listeners` are among those that it has.

    Raises `ConfigurationError` for a session instead of a builder and for `jvm_listeners` that are no list of names,
    `UnsupportedSession` for Spark Connect, `UnsupportedSpark`, `JarMissing`, `ListenerError` for a class instead of an
    instance, and `ListenerNotPicklable`.
    """
    if isinstance(builder, SparkSession):
        raise ConfigurationError(
            "stagecrew.configure takes SparkSession.builder, and this is a session that was built already. Spark reads "
            "spark.plugins only when a session starts: pass the builder, then call getOrCreate()"
        )
    if not isinstance(builder, SparkSession.Builder):
        if type(builder).__module__.startswith("pyspark.sql.connect"):
            raise UnsupportedSession(_CONNECT)
        raise ConfigurationError(f"stagecrew.configure takes SparkSession.builder, not {type(builder).__name__}")
    if not pyspark.__version__.startswith(SPARK_LINE + "."):
        raise UnsupportedSpark(
            f"stagecrew {__version__} is built for Spark {SPARK_LINE}, and pyspark {pyspark.__version__} is installed: "
            f"`pip install 'pyspark~={SPARK_LINE}.0'`"
        )
    registered, classes = checked(listeners), class_names(jvm_listeners)
    pickled(registered)  # now, not when the session starts
    jar_path()
    get_or_create, create = builder.getOrCreate, builder.create
    builder.getOrCreate = lambda: _start(builder, get_or_create, registered, classes)  # type: ignore[method-assign]
    builder.create = lambda: _start(builder, create, registered, classes)  # type: ignore[method-assign]
    return builder


_CONNECT: Final = (
    "this is Spark Connect, whose client has no JVM beside it; stagecrew needs a classic session. Take away SPARK_REMOTE, "
    "`.remote(...)` and spark.api.mode=connect, and give a master instead"
)


def _start(
    builder: SparkSession.Builder,
    make: Callable[[], SparkSession],
    listeners: tuple[Listener, ...],
    classes: tuple[str, ...],
) -> SparkSession:
    options: dict[str, Any] = builder._options
    mode = str(options.get("spark.api.mode", os.environ.get("SPARK_API_MODE", ""))).lower()
    if (
        "SPARK_REMOTE" in os.environ
        or "SPARK_CONNECT_MODE_ENABLED" in os.environ
        or "spark.remote" in options
        or (mode if mode in ("classic", "connect") else default_api_mode()) == "connect"
    ):
        raise UnsupportedSession(_CONNECT)
    running = SparkContext._active_spark_context
    if running is not None:
        if _facade(running) is None:
            raise NotActive(f"a SparkContext runs already, without stagecrew; Spark would ignore the plugin. {_REMEDY}")
        session = make()
        crew(session).already_has(listeners)
        return session
    held = _held(options)
    for key, ours in spark_conf(jvm_listeners=classes).items():
        options[key] = joined(held(key), str(options.get(key) or ""), ours)
    _load_jar()
    try:
        session = make()
    except Exception as error:
        refusal = _refusal(error)
        if refusal is error:
            raise
        raise refusal from error
    try:
        crew(session).register(listeners)
    except BaseException:
        session.stop()
        raise
    return session


def _held(options: dict[str, Any]) -> Callable[[str], str]:
    """What the JVM holds of a property, by spark-submit and spark-defaults.conf; a setting of the builder would replace it.

    Starts the JVM if there is none, or connects to that of spark-submit, as PySpark would a moment later: with the builder's
    options, some of which (`spark.jars.packages`, `spark.driver.memory`) have no effect later.
    """
    if SparkContext._gateway is None:
        if str(options.get("spark.executor.allowSparkContext", "")).lower() != "true":
            SparkContext._assert_on_driver()
        conf = SparkConf()
        for key, value in options.items():
            conf.set(key, value)
        SparkContext._ensure_initialized(conf=conf)
    assert SparkContext._jvm is not None
    held: Any = SparkContext._jvm.SparkConf(True)
    return lambda key: str(held.get(key, ""))


def _refusal(error: Exception) -> Exception:
    """What our plugin refused, as an error of ours; anything else as it is."""
    # py4j's own error, or what PySpark makes of it once a session has been.
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    text = ""
    while java is not None:
        if java.getClass().getName() == "java.lang.ClassNotFoundException":
            return error  # of somebody's plugin: its message is no more than a name, which may look like ours
        text = str(java.getMessage())
        java = java.getCause()
    if not text:
        text = str(error)
    if "stagecrew" not in text:
        return error
    return UnsupportedSpark(text) if "is built for Spark" in text else ConfigurationError(text)


def _load_jar() -> None:
    """The JVM learns of the jar, unless it was started with it."""
    assert SparkContext._jvm is not None
    loader = SparkContext._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(PLUGIN)
    except Py4JError:
        try:
            loader.addURL(SparkContext._jvm.java.io.File(jar_path()).toURI().toURL())
            loader.loadClass(PLUGIN)
        except Py4JError as error:
            raise ConfigurationError(
                "the JVM of this Python process was started without stagecrew's jar and cannot load it now; start Python "
                "anew, or pass `--jars $(stagecrew jar)` to spark-submit"
            ) from error


def _facade(context: SparkContext) -> Any:
    if context._jvm is None or context._jsc is None:
        return None
    try:
        return context._jvm.org.apache.spark.stagecrew.Shim.driver(context.applicationId)
    except (Py4JError, TypeError):
        return None  # the jar is not there: a package, not a class


def is_active(spark: SparkSession) -> bool:
    """Whether the plugin runs in this session. It asks the JVM: `spark.plugins` may show it and Spark have ignored it."""
    context = getattr(spark, "_sc", None)
    return isinstance(context, SparkContext) and context._jsc is not None and _facade(context) is not None


def crew(spark: SparkSession) -> Crew:
    """The crew of this session. Raises `NotActive`, `UnsupportedSession` or `VersionMismatch`."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UnsupportedSession(_CONNECT)
    if not isinstance(spark, SparkSession):
        raise ConfigurationError(f"stagecrew.crew takes a SparkSession, not {type(spark).__name__}")
    context = spark.sparkContext
    known = getattr(context, "_stagecrew", None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    facade = _facade(context)
    if facade is None:
        raise NotActive(f"stagecrew does not run in this SparkContext. {_REMEDY}")
    if facade.version() != __version__:
        raise VersionMismatch(
            f"the jar that Spark loaded is stagecrew {facade.version()}, the Python package is {__version__}: use the jar of "
            f"this package, {jar_path()}"
        )
    made = Crew(context, facade)
    context._stagecrew = made  # type: ignore[attr-defined]
    return made


class Crew:
    """What coordinates one Spark application. Made by `stagecrew.crew(spark)`."""

    def __init__(self, context: SparkContext, facade: Any) -> None:
        self.context = context
        self.facade = facade
        self.close_timeout: float = facade.closeTimeoutMs() / 1000
        self.active: list[Topology] = []
        self.marks = Marks(self)
        self._registered: tuple[Listener, ...] | None = None
        self._channel: DriverChannel | None = None
        self._making = threading.Lock()
        if (
            str(context.master).startswith("local")
            and "PYSPARK_PYTHON" not in os.environ
            and context.getConf().get("spark.pyspark.python") is None
        ):
            context.pythonExec = sys.executable
        # The plugin set it while the SparkContext began; PySpark had read it before, and hands it to every Python worker.
        if path := context.getConf().get("spark.executorEnv.PYTHONPATH"):
            context.environment["PYTHONPATH"] = path
        self._drain_before_stop()

    @property
    def running(self) -> bool:
        """Whether the SparkContext has not stopped."""
        return self.context._jsc is not None

    def topology(self, name: str, listeners: Iterable[Listener] = (), jvm_listeners: Iterable[str] = ()) -> Topology:
        """A new topology with these listeners; it begins with `with` or `start`.

        `name` is shown in logs and in the UI and may be used again; `jvm_listeners` are names of classes that implement
        `stagecrew.TopologyListener`. A topology that begins inside another is covered by the outer one's listeners too.

        Raises `ListenerError`, `ListenerNotPicklable` and `ConfigurationError`, `NotActive` after the session has stopped.
        """
        self.require_running()
        every = checked(listeners)
        pickled(every)
        return Topology(self, name, every, class_names(jvm_listeners))

    def require_running(self) -> None:
        """Raises `NotActive` after the SparkContext has stopped."""
        if not self.running:
            raise NotActive("the session of this crew has stopped; call stagecrew.crew(spark) with the new one")

    @property
    def reports(self) -> list[TopologyReport]:
        """Of every topology that the driver remembers, the application's first."""
        return [TopologyReport.of(node) for node in json.loads(self.facade.report(""))["topologies"]]

    def report(self, topology: str) -> TopologyReport | None:
        """Of one topology by its id; None when it is not known (any more). The application's is `application`."""
        found = json.loads(self.facade.report(topology))["topologies"]
        return TopologyReport.of(found[0]) if found else None

    def register(self, listeners: tuple[Listener, ...]) -> None:
        """Gives the application its listeners; before its first task, by `configure`."""
        if self._registered is not None:
            self.already_has(listeners)
            return
        self.facade.registerApplication(self._description("application", "application", None, listeners, ()))
        for listener in listeners:
            listener._stagecrew.registered_for("the application")
        self._registered = listeners

    def already_has(self, listeners: tuple[Listener, ...]) -> None:
        """Raises `ConfigurationError` unless all of these are the application's listeners."""
        mine = self._registered or ()
        missing = [one for one in listeners if not any(one._stagecrew.same(other._stagecrew) for other in mine)]
        if missing:
            names = ", ".join(map(listener_name, missing))
            raise ConfigurationError(
                f"the application runs already, and its listeners cannot change any more; not among them: {names}. Stop the "
                f"session first, or use a topology: crew.topology(..., listeners=[...])"
            )

    def begin(
        self, topology: str, name: str, parent: str | None, listeners: Sequence[Listener], jvm_listeners: Sequence[str]
    ) -> None:
        """Tells the driver of a topology."""
        try:
            self.facade.begin(self._description(topology, name, parent, listeners, jvm_listeners))
        except Py4JError as error:
            java = getattr(error, "java_exception", None)
            raise ConfigurationError(
                f"topology {name!r} cannot begin: {java.getMessage() if java else error}"
            ) from error

    def end(self, topology: str, seconds: float) -> None:
        """Ends a topology on all executors; returns when they have closed it, or say who has not."""
        self.facade.end(topology, int(seconds * 1000))
        # In slices, so that Ctrl-C is heard; the driver's own bound is a little longer than that of executors.
        deadline = time.monotonic() + seconds + 5
        while not self.facade.awaitEnd(topology, 100) and time.monotonic() < deadline:
            pass

    def _description(
        self,
        topology: str,
        name: str,
        parent: str | None,
        listeners: Sequence[Listener],
        jvm_listeners: Sequence[str],
    ) -> bytes:
        entries: list[dict[str, Any]] = [
            {
                "kind": "jvm",
                "name": cls.rsplit(".", 1)[-1],
                "target": cls,
                "scope": "jvm",
                "lifetime": "application",
                "required": True,
            }
            for cls in jvm_listeners
        ]
        names = [listener_name(listener) for listener in listeners]
        for i, listener in enumerate(listeners):
            repeated = names[:i].count(names[i])
            entries.append(
                {
                    "kind": "pickle",
                    "name": f"{names[i]}#{repeated + 1}" if repeated else names[i],
                    "scope": listener.scope.value,
                    "lifetime": listener.lifetime.value,
                    "required": listener.required,
                    "blob": i,
                }
            )
        context = self.context
        body = {
            "id": topology,
            "name": name,
            "parent": parent,
            "executable": context.pythonExec,
            "environment": {str(key): str(value) for key, value in context.environment.items()},
            "files": list(context._python_includes or ()),
            "listeners": [{"index": i, **entry} for i, entry in enumerate(entries)],
        }
        return encode("DESCRIPTION", topology=topology, body=json.dumps(body), blobs=pickled(listeners))

    def host(self) -> Host:
        """What serves the coordinators of this session; made at the first call."""
        from stagecrew.coordination.channel import DriverChannel
        from stagecrew.coordination.host import Host

        with self._making:
            if self._channel is None:
                conf = self._setting
                limit = parse_bytes(conf("spark.stagecrew.event.maxSize"))
                ack_timeout = parse_seconds(conf("spark.stagecrew.ack.timeout"))
                self._channel = DriverChannel(
                    self.facade.coordinationPlace(), lambda wire: Host(wire, limit, ack_timeout)
                )
            return self._channel.host

    @property
    def request_timeout(self) -> float:
        """How long a task waits for its coordinator, in seconds."""
        return parse_seconds(self._setting("spark.stagecrew.request.timeout"))

    def _setting(self, key: str) -> str:
        default = next(one.default for one in KEYS if one.name == key)
        return str(self.context.getConf().get(key, default))

    def _drain_before_stop(self) -> None:
        stop = self.context.stop

        def drained_stop() -> None:
            if self.running:
                try:
                    self.facade.drain(int(self.close_timeout * 1000))
                except Exception as error:  # the JVM may be gone: the user's stop must still do what it can
                    import logging

                    logging.getLogger("stagecrew").warning(
                        "closing listeners before the session stops failed: %s", error
                    )
                if self._channel is not None:
                    self._channel.close()
            stop()

        self.context.stop = drained_stop  # type: ignore[method-assign]
