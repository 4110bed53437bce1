"""From a session builder to a crew: switching the plugin on, and talking to it on the driver."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkContext, cloudpickle
from pyspark.sql import SparkSession

from stagecrew._version import __version__
from stagecrew.conf import PLUGIN
from stagecrew.errors import (
    ConfigurationError,
    ListenerError,
    ListenerNotPicklable,
    NotActive,
    UnsupportedSession,
    UnsupportedSpark,
    VersionMismatch,
)
from stagecrew.frames import encode
from stagecrew.jar import SPARK_LINE, appended, jar_path, spark_conf
from stagecrew.listeners import Listener, Resource, ResourceFactory, listener_name, registering
from stagecrew.topology import Topology, TopologyReport

__all__ = ["Crew", "configure", "crew", "is_active", "jar_path", "spark_conf"]

Builder = TypeVar("Builder")

_REMEDY: Final = (
    "Stop this session and build it again with `stagecrew.configure(SparkSession.builder).getOrCreate()`, or start the "
    f"application with `spark-submit --jars $(stagecrew jar) --conf spark.plugins={PLUGIN}`."
)


def configure(builder: Builder, listeners: Iterable[Listener] = (), jvm_listeners: Iterable[str] = ()) -> Builder:
    """Switches stagecrew on for the session that this builder makes, with listeners for the whole application.

    Answers the builder: `stagecrew.configure(SparkSession.builder, listeners=[orders]).getOrCreate()`. It appends to
    `spark.plugins` and `spark.jars`, never replaces; what is configured on the builder afterwards counts too. In a local
    master the workers run the driver's own interpreter when neither PYSPARK_PYTHON nor `spark.pyspark.python` is set.

    It does **not** start Spark. `getOrCreate` raises `NotActive` when a SparkContext runs already without the plugin: Spark
    would silently ignore it. With the plugin, it answers the running session when `listeners` are those that it has.

    Raises `ConfigurationError` for a session instead of a builder, `UnsupportedSession` for Spark Connect,
    `UnsupportedSpark`, `JarMissing`, `ListenerError` for a class instead of an instance, and `ListenerNotPicklable`.
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
    registered, classes = checked(listeners), tuple(jvm_listeners)
    pickled(registered)  # now, not when the session starts
    jar_path()
    get_or_create = builder.getOrCreate

    def start() -> SparkSession:
        return _start(builder, get_or_create, registered, classes)

    builder.getOrCreate = start  # type: ignore[method-assign]
    return builder


_CONNECT: Final = (
    "this is Spark Connect, whose client has no JVM beside it; stagecrew needs a classic session. Take away SPARK_REMOTE, "
    "`.remote(...)` and spark.api.mode=connect, and give a master instead"
)


def _start(
    builder: SparkSession.Builder,
    get_or_create: Callable[[], SparkSession],
    listeners: tuple[Listener, ...],
    classes: tuple[str, ...],
) -> SparkSession:
    options: dict[str, Any] = builder._options
    if (
        "SPARK_REMOTE" in os.environ
        or "SPARK_CONNECT_MODE_ENABLED" in os.environ
        or "spark.remote" in options
        or str(options.get("spark.api.mode", os.environ.get("SPARK_API_MODE", ""))).lower() == "connect"
    ):
        raise UnsupportedSession(_CONNECT)
    running = SparkContext._active_spark_context
    if running is not None:
        if _facade(running) is None:
            raise NotActive(f"a SparkContext runs already, without stagecrew; Spark would ignore the plugin. {_REMEDY}")
        session = get_or_create()
        crew(session).already_has(listeners)
        return session
    defaults = _spark_defaults()
    for key, ours in spark_conf().items():
        options[key] = appended(str(options.get(key, defaults.get(key, ""))), ours)
    if classes:
        key = "spark.stagecrew.jvmListeners"
        for name in classes:
            options[key] = appended(str(options.get(key, defaults.get(key, ""))), name)
    _load_jar()
    try:
        session = get_or_create()
    except Exception as error:
        raise _refusal(error) from error
    try:
        crew(session).register(listeners)
    except BaseException:
        session.stop()
        raise
    return session


def _refusal(error: Exception) -> Exception:
    """What our plugin refused, as an error of ours; anything else as it is."""
    text = ""
    java = getattr(error, "java_exception", None)
    while java is not None:
        text = str(java.getMessage())
        java = java.getCause()
    if not text:
        text = str(error)
    if "stagecrew" not in text or "ClassNotFoundException" in text:
        return error
    return UnsupportedSpark(text) if "is built for Spark" in text else ConfigurationError(text)


def _load_jar() -> None:
    """A JVM that runs already, because of `spark-submit` or an earlier session, learns of the jar."""
    gateway = SparkContext._gateway
    if gateway is None or SparkContext._jvm is None:
        return
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


def _spark_defaults() -> dict[str, str]:
    """What spark-defaults.conf says; a setting of the builder would replace it, so ours are appended to it."""
    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    path = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf") / "spark-defaults.conf"
    found: dict[str, str] = {}
    if path.is_file():
        joined = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
        for line in joined.splitlines():
            stripped = line.strip()
            if stripped and stripped[0] not in "#!":
                # As java.util.Properties: the first blank, = or : ends the key.
                key, value = re.split(r"\s*[=:]\s*|\s+", stripped + " ", maxsplit=1)
                found[key] = value.strip()
    return found


def checked(listeners: Iterable[Listener]) -> tuple[Listener, ...]:
    """These listeners, if each is one. Raises `ListenerError` that says what to write instead."""
    every: tuple[Any, ...] = tuple(listeners)
    for listener in every:
        if isinstance(listener, Listener):
            continue
        if inspect.isclass(listener) and issubclass(listener, Listener):
            raise ListenerError(
                f"{listener.__qualname__} is a class; register an instance: listeners=[{listener.__qualname__}(...)]"
            )
        if isinstance(listener, ResourceFactory):
            raise ListenerError(
                f"{listener.name} is a resource that was not called; register listeners=[{listener.name}(...)]"
            )
        raise ListenerError(
            f"{listener!r} is no stagecrew.Listener; subclass Listener or decorate a generator with @stagecrew.resource"
        )
    return every


def pickled(listeners: Sequence[Listener]) -> list[bytes]:
    """The bytes of each listener. Raises `ListenerNotPicklable`, which names the listener and the attribute."""
    return [_pickled(listener) for listener in listeners]


def _pickled(listener: Listener) -> bytes:
    with registering():
        try:
            return cloudpickle.dumps(listener)  # type: ignore[no-any-return, no-untyped-call]
        except Exception as error:
            parts = dict(vars(listener))
            if isinstance(listener, Resource):
                parts = {f"argument {i + 1}": value for i, value in enumerate(listener._args)}
                parts |= {f"argument {name!r}": value for name, value in listener._kwargs.items()}
            culprit = ""
            for name, value in parts.items():
                try:
                    cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
                except Exception:
                    what = name if isinstance(listener, Resource) else f"attribute {name!r}"
                    culprit = f": its {what} is a {type(value).__name__}, which cannot travel"
                    break
            raise ListenerNotPicklable(
                f"listener {listener_name(listener)!r} cannot be pickled{culprit} ({type(error).__name__}: {error}). Create "
                f"such things in open(), which runs on the executor"
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
        self._registered: tuple[Listener, ...] | None = None
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

        Raises `ListenerError` and `ListenerNotPicklable`, `NotActive` after the session has stopped.
        """
        if not self.running:
            raise NotActive("the session of this crew has stopped; call stagecrew.crew(spark) with the new one")
        every = checked(listeners)
        pickled(every)
        return Topology(self, name, every, tuple(jvm_listeners))

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
            listener._stagecrew.topologies.append("the application")
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
            stop()

        self.context.stop = drained_stop  # type: ignore[method-assign]
