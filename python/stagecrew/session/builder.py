"""From a session builder to a crew: switching the plugin on, and talking to it on the driver."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.util import default_api_mode

from stagecrew._version import __version__
from stagecrew.conf import PLUGIN
from stagecrew.errors import (
    ConfigurationError,
    NotActive,
    OperatorMisused,
    UnsupportedSession,
    UnsupportedSpark,
    VersionMismatch,
)
from stagecrew.jar import SPARK_LINE, jar_path, joined, spark_conf
from stagecrew.listeners.listener import Listener
from stagecrew.session.application import Application
from stagecrew.session.crew import Crew
from stagecrew.session.registration import checked, class_names, import_named, pickled
from stagecrew.session.running_job import running_job

if TYPE_CHECKING:
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.contract import Coordinator

__all__ = ["configure", "crew", "is_active", "jar_path", "spark_conf"]

Builder = TypeVar("Builder")

_REMEDY: Final = (
    "Stop this session and build it again with `stagecrew.configure(SparkSession.builder).getOrCreate()`, or start the "
    f"application with `spark-submit --jars $(stagecrew jar) --conf spark.plugins={PLUGIN}`."
)


def configure(
    builder: Builder,
    listeners: Iterable[Listener] = (),
    jvm_listeners: Iterable[str] = (),
    coordinators: Mapping[str, Callable[[CoordinatorContext], Coordinator]] | None = None,
    restore: Checkpoint | None = None,
) -> Builder:
    """Switches stagecrew on for the session that this builder makes, with listeners and operators for the whole application.

    Answers the builder: `stagecrew.configure(SparkSession.builder, listeners=[orders]).getOrCreate()`, or `.create()`. It
    appends to `spark.plugins`, `spark.jars` and `spark.stagecrew.jvmListeners`, never replaces: to those of the builder, also
    when they are set on it afterwards, and to those with which the JVM was started (`spark-submit`, PYSPARK_SUBMIT_ARGS,
    `spark.jars.packages`, and spark-defaults.conf, of which a JVM that starts here takes what the builder has not). In an
    application that `spark-submit` started it works without `--jars`. In a local master the workers run the driver's own
    interpreter when neither PYSPARK_PYTHON nor `spark.pyspark.python` is set.

    It does **not** start Spark. `getOrCreate` and `create` raise `NotActive` when a SparkContext runs already without the
    plugin: Spark would silently ignore it. With the plugin, they answer the running session, or a new one beside it, when
    `listeners` and `coordinators` are among those that it has.

    `coordinators` are factories by the names of operators, for `Crew.operator`. They are made, and restored as of `restore`,
    when the session starts, before the SparkContext exists: one that raises then is the `CoordinatorFailed` of `getOrCreate`,
    and nothing was started. Each `start`s when the SparkContext runs.

    Raises `ConfigurationError` for a session instead of a builder and for `jvm_listeners` that are no list of names,
    `OperatorMisused` for coordinators that are no factories by name,
    `UnsupportedSession` for Spark Connect, `UnsupportedSpark`, `JarMissing`, `ListenerError` for a class instead of an
    instance, and `ListenerNotPicklable`. `getOrCreate` and `create` raise `ListenerNotImportable` for a name in
    `spark.stagecrew.listeners` that the driver cannot import, and stop the session; a missing top-level module is a warning.
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
    factories = dict(coordinators or {})
    for name, factory in factories.items():
        if not callable(factory) or not isinstance(name, str):
            raise OperatorMisused(
                f"coordinators= takes factories, such as classes, by the names of their operators, not {name!r}: {factory!r}"
            )
    jar_path()
    wanted = _Wanted(registered, classes, factories, restore)
    get_or_create, create = builder.getOrCreate, builder.create
    builder.getOrCreate = lambda: _start(builder, get_or_create, wanted)  # type: ignore[method-assign]
    builder.create = lambda: _start(builder, create, wanted)  # type: ignore[method-assign]
    return builder


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What `configure` was given."""

    listeners: tuple[Listener, ...]
    jvm_listeners: tuple[str, ...]
    coordinators: dict[str, Callable[[CoordinatorContext], Coordinator]]
    restore: Checkpoint | None


_CONNECT: Final = (
    "this is Spark Connect, whose client has no JVM beside it; stagecrew needs a classic session. Take away SPARK_REMOTE, "
    "`.remote(...)` and spark.api.mode=connect, and give a master instead"
)


def _start(builder: SparkSession.Builder, make: Callable[[], SparkSession], wanted: _Wanted) -> SparkSession:
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
        crew(session).already_has(wanted.listeners, wanted.coordinators)
        return session
    application = Application(wanted.coordinators, wanted.restore)
    try:
        return _start_new(options, make, wanted, application)
    except BaseException:
        application.operators.close("the session did not start")
        raise


def _start_new(
    options: dict[str, Any], make: Callable[[], SparkSession], wanted: _Wanted, application: Application
) -> SparkSession:
    held = _held(options)
    for key, ours in spark_conf(jvm_listeners=wanted.jvm_listeners).items():
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
        # Now, as files of the configuration are on the path since Spark has started.
        import_named(session.sparkContext.getConf().get("spark.stagecrew.listeners", ""))
        crew(session).register(wanted.listeners, application)
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


def running_crew() -> Crew | None:
    """The crew of the session that runs in this process, if anybody has asked for one."""
    context = SparkContext._active_spark_context
    found: Crew | None = getattr(context, "_stagecrew", None)
    return found if found is not None and found.running else None


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
    if (job := running_job()) is not None:
        job.show()
    return made
