"""A test of stagecrew that runs next to PySpark's own tests.

Workers find modules on the executor's PYTHONPATH, with or without the plugin.
"""

import os
import pathlib
import tempfile
import unittest

from pyspark import SparkContext


class PythonPathTests(unittest.TestCase):
    """Executors inherit the environment of the driver's JVM, with a local master and in a local cluster."""

    @classmethod
    def setUpClass(cls):
        """Adds a directory to the PYTHONPATH before the JVM starts."""
        cls.folder = tempfile.TemporaryDirectory()
        (pathlib.Path(cls.folder.name) / "of_the_node.py").write_text("NAME = 'here'\n")
        cls.before = os.environ["PYTHONPATH"]
        os.environ["PYTHONPATH"] = os.pathsep.join([cls.before, cls.folder.name])

    @classmethod
    def tearDownClass(cls):
        """Restores the PYTHONPATH."""
        os.environ["PYTHONPATH"] = cls.before
        cls.folder.cleanup()

    def assert_module_is_found(self, master):
        """Runs one task that imports the module."""

        def import_module(_rows):
            import sys

            import of_the_node

            yield of_the_node.NAME, sys.path

        context = SparkContext(master, "paths")
        try:
            ((name, path),) = context.parallelize([1], 1).mapPartitions(import_module).collect()
        finally:
            context.stop()
        assert name == "here"
        assert set(os.environ["PYTHONPATH"].split(os.pathsep)) <= set(path), path

    def test_local(self):
        """Workers of the executor in the driver's JVM find the module."""
        self.assert_module_is_found("local[1]")

    def test_local_cluster(self):
        """Workers of an executor in a JVM of its own find the module."""
        self.assert_module_is_found("local-cluster[1,1,1024]")
