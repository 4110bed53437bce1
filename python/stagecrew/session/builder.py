"""Enables the plugin in a session builder, and returns the crew of a running session."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from stagecrew._version import __version__
from stagecrew.conf import PLUGIN
from stagecrew.errors import ConfigurationError, NotActive, OperatorMisused
from stagecrew.jar import jar_path, joined, spark_conf
from stagecrew.listeners.listener import Listener
from stagecrew.session.application import Application
from stagecrew.session.crew import Crew
from stagecrew.session.registration import check_imports, checked, class_names, pickled
from stagecrew.session.running_job import running_job
from stagecrew.spark_version import require_supported

if TYPE_CHECKING:
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.contract import Coordinator

__all__ = ["configure", "crew", "is_active", "jar_path", "spark_conf"]

Builder = TypeVar("Builder")

_REMEDY: Final = (
    "Stop this session and build it again with `stagecrew.configure(SparkSession.builder).getOrCreate()`, or start the "
    f'application with `spark-submit --jars "$(stagecrew jar)" --conf spark.plugins={PLUGIN}`.'
)

#: Held while a crew is created, because a session has only one.
_creating: Final = threading.Lock()


def configure(
    builder: Builder,
    listeners: Iterable[Listener] = (),
    jvm_listeners: Iterable[str] = (),
    coordinators: Mapping[str, Callable[[CoordinatorContext], Coordinator]] | None = None,
    restore: Checkpoint | None = None,
) -> Builder:
    """Enables stagecrew in the session that this builder creates, with listeners and operators.

    It does **not** start Spark. It appends to `spark.plugins`, `spark.jars` and `spark.stagecrew.jvmListeners`, and
    replaces no value. It keeps the values of the builder, even if they are set afterwards, and the values with which
    the JVM was started (`spark-submit`, PYSPARK_SUBMIT_ARGS, `spark.jars.packages`, spark-defaults.conf). There is one
    exception: if the builder starts the JVM, its value of a key replaces the one in spark-defaults.conf. An application
    that `spark-submit` started does not need `--jars`. With a local master, workers run the driver's Python interpreter
    unless PYSPARK_PYTHON or `spark.pyspark.python` is set.

    Args:
        builder: `SparkSession.builder`.
        listeners: Listeners of the application topology.
        jvm_listeners: Names of classes that implement `stagecrew.TopologyListener`.
        coordinators: A factory for each operator of the application, by the operator's name; see `Crew.operator`.
            They are called when the session starts, before the SparkContext exists. The `start` of a coordinator is
            called once the SparkContext is running.
        restore: A checkpoint of an earlier session, from which the coordinators are restored.

    Returns:
        The builder. If an application with the plugin is already running, and has these listeners and coordinators,
        `getOrCreate` returns its session, and `create` returns another session of the same application.

    Raises:
        ConfigurationError: `builder` is not a session builder, or `jvm_listeners` is not a list of names.
        OperatorMisused: `coordinators` does not map names to factories.
        ConfigurationError: The builder is for Spark Connect.
        ConfigurationError: The installed PySpark is not supported.
        ConfigurationError: This installation has no jar.
        ListenerError: An element of `listeners` is not a listener, such as a class instead of an instance.
        ListenerError: A listener cannot be pickled.

    Examples:
        builder = stagecrew.configure(SparkSession.builder.master("local[2]"), listeners=[orders])
        spark = builder.getOrCreate()

    `getOrCreate` and `create` raise

    * `NotActive` if a SparkContext is already running without the plugin, because Spark would silently ignore the
      plugin;
    * `ConfigurationError` if an application with the plugin is already running, but does not have these listeners and
      coordinators;
    * `CoordinatorFailed` if a factory raises an exception. No session is started then;
    * `ListenerError` if the driver cannot import a name in `spark.stagecrew.listeners`. The session is stopped then. A
      missing top-level module is only a warning.
    """
    if isinstance(builder, SparkSession):
        raise ConfigurationError(
            "stagecrew.configure takes SparkSession.builder, but this is a running session. Spark reads "
            "spark.plugins only when a session starts: pass the builder, then call getOrCreate()"
        )
    if not isinstance(builder, SparkSession.Builder):
        if type(builder).__module__.startswith("pyspark.sql.connect"):
            raise ConfigurationError(_CONNECT)
        raise ConfigurationError(f"stagecrew.configure takes SparkSession.builder, not {type(builder).__name__}")
    require_supported(pyspark.__version__)
    registered, classes = checked(listeners), class_names(jvm_listeners)
    pickled(registered)  # so that an error is raised here, and not when the session starts
    factories = dict(coordinators or {})
    for name, factory in factories.items():
        if not callable(factory) or not isinstance(name, str):
            raise OperatorMisused(
                f"coordinators= maps names of operators to factories, such as Coordinator classes, not {name!r} to "
                f"{factory!r}"
            )
    jar_path()
    arguments = _Arguments(registered, classes, factories, restore)
    get_or_create, create = builder.getOrCreate, builder.create
    builder.getOrCreate = lambda: _start(builder, get_or_create, arguments)  # type: ignore[method-assign]
    builder.create = lambda: _start(builder, create, arguments)  # type: ignore[method-assign]
    return builder


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arguments of `configure`."""

    listeners: tuple[Listener, ...]
    jvm_listeners: tuple[str, ...]
    coordinators: dict[str, Callable[[CoordinatorContext], Coordinator]]
    restore: Checkpoint | None


_CONNECT: Final = (
    "this is Spark Connect, whose client has no JVM; stagecrew needs a classic session. Remove SPARK_REMOTE, "
    "`.remote(...)` and spark.api.mode=connect, and set a master instead"
)


def _start(builder: SparkSession.Builder, make: Callable[[], SparkSession], arguments: _Arguments) -> SparkSession:
    from pyspark.util import default_api_mode  # Spark 3.5, which `configure` refuses, does not have it

    options: dict[str, Any] = builder._options
    mode = str(options.get("spark.api.mode", os.environ.get("SPARK_API_MODE", ""))).lower()
    if (
        "SPARK_REMOTE" in os.environ
        or "SPARK_CONNECT_MODE_ENABLED" in os.environ
        or "spark.remote" in options
        or (mode if mode in ("classic", "connect") else default_api_mode()) == "connect"
    ):
        raise ConfigurationError(_CONNECT)
    running = SparkContext._active_spark_context
    if running is not None:
        if _facade(running) is None:
            raise NotActive(
                f"a SparkContext is already running without stagecrew, and Spark would ignore the plugin. {_REMEDY}"
            )
        session = make()
        crew(session)._require_registered(arguments.listeners, arguments.coordinators)
        return session
    application = Application(arguments.coordinators, arguments.restore)
    try:
        return _start_new(options, make, arguments, application)
    except BaseException:
        application.operators.close("the session did not start")
        raise


def _start_new(
    options: dict[str, Any], make: Callable[[], SparkSession], arguments: _Arguments, application: Application
) -> SparkSession:
    jvm_setting = _jvm_settings(options)
    for key, value in spark_conf(jvm_listeners=arguments.jvm_listeners).items():
        options[key] = joined(jvm_setting(key), str(options.get(key) or ""), value)
    _load_jar()
    try:
        session = make()
    except Exception as error:
        ours = _as_our_error(error)
        if ours is error:
            raise
        raise ours from error
    try:
        # Spark has now added the configured files to the import path.
        check_imports(session.sparkContext.getConf().get("spark.stagecrew.listeners", ""))
        crew(session)._register(arguments.listeners, application)
    except BaseException:
        session.stop()
        raise
    return session


def _jvm_settings(options: dict[str, Any]) -> Callable[[str], str]:
    """Returns a function that maps a property to its value in the JVM, from spark-submit or spark-defaults.conf.

    The caller needs these values to append to them, because a value that the builder sets replaces the JVM's value.
    This function starts the JVM if none exists, or connects to the JVM of spark-submit, just before PySpark would do
    the same. It passes the builder's options to the JVM, because some of them (`spark.jars.packages`,
    `spark.driver.memory`) have an effect only when the JVM starts.
    """
    if SparkContext._gateway is None:
        if str(options.get("spark.executor.allowSparkContext", "")).lower() != "true":
            SparkContext._assert_on_driver()
        conf = SparkConf()
        for key, value in options.items():
            conf.set(key, value)
        SparkContext._ensure_initialized(conf=conf)
    assert SparkContext._jvm is not None
    conf_of_jvm: Any = SparkContext._jvm.SparkConf(True)
    return lambda key: str(conf_of_jvm.get(key, ""))


def _as_our_error(error: Exception) -> Exception:
    """Converts an error of the plugin to a `ConfigurationError`. Returns any other error unchanged."""
    # py4j's error has `java_exception`. After the first session, PySpark converts it to its own error with `_origin`.
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    text = ""
    while java is not None:
        if java.getClass().getName() == "java.lang.ClassNotFoundException":
            return error  # another plugin's class: its name may contain "stagecrew"
        text = str(java.getMessage())
        java = java.getCause()
    if not text:
        text = str(error)
    if "stagecrew" not in text:
        return error
    return ConfigurationError(text)


def _load_jar() -> None:
    """Loads the jar into the JVM, unless the JVM was started with it."""
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
                "the JVM of this Python process was started without stagecrew's jar and cannot load it now; restart "
                'Python, or pass `--jars "$(stagecrew jar)"` to spark-submit'
            ) from error


def _facade(context: SparkContext) -> Any:
    if context._jvm is None or context._jsc is None:
        return None
    try:
        return context._jvm.org.apache.spark.stagecrew.Shim.driver(context.applicationId)
    except (Py4JError, TypeError):
        return None  # without the jar this name is a package, not a class


def is_active(spark: SparkSession) -> bool:
    """Whether the plugin is running in this session. Asks the JVM, because Spark may ignore `spark.plugins`.

    Args:
        spark: A session.

    Returns:
        True if the plugin is running. False for a Spark Connect session and for a session that has stopped.

    Examples:
        assert stagecrew.is_active(spark)
    """
    context = getattr(spark, "_sc", None)
    return isinstance(context, SparkContext) and context._jsc is not None and _facade(context) is not None


def running_crew() -> Crew | None:
    """Returns the crew of this process's running session. Returns None if `crew` was not called for it."""
    context = SparkContext._active_spark_context
    created: Crew | None = getattr(context, "_stagecrew", None)
    return created if created is not None and created.running else None


def crew(spark: SparkSession) -> Crew:
    """Returns the crew of this session. Each call for one session returns the same object.

    Args:
        spark: A session that `configure` prepared, or that was started with
            `spark.plugins=stagecrew.StagecrewPlugin`.

    Returns:
        The crew.

    Raises:
        NotActive: The plugin is not running in this session.
        ConfigurationError: This is a Spark Connect session.
        ConfigurationError: The jar that Spark loaded and the Python package have different versions.
        ConfigurationError: `spark` is not a session.

    Examples:
        crew = stagecrew.crew(spark)
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigurationError(_CONNECT)
    if not isinstance(spark, SparkSession):
        raise ConfigurationError(f"stagecrew.crew takes a SparkSession, not {type(spark).__name__}")
    with _creating:
        return _crew_of(spark.sparkContext)


def _crew_of(context: SparkContext) -> Crew:
    existing = getattr(context, "_stagecrew", None)
    if existing is not None:
        return existing  # type: ignore[no-any-return]
    facade = _facade(context)
    if facade is None:
        raise NotActive(f"stagecrew is not running in this SparkContext. {_REMEDY}")
    if facade.version() != __version__:
        raise ConfigurationError(
            f"Spark loaded the jar of stagecrew {facade.version()}, and the Python package is {__version__}: use the "
            f"jar of this package, {jar_path()}"
        )
    created = Crew(context, facade)
    context._stagecrew = created  # type: ignore[attr-defined]
    if (job := running_job()) is not None:
        job.show()
    return created
