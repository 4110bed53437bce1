"""A test of our own among PySpark's: workers find modules of the executor's own PYTHONPATH, with the plugin as without."""

import os
import pathlib
import tempfile
import unittest

from pyspark import SparkContext


class PythonPathTests(unittest.TestCase):
    """The environment of the driver's JVM is that of its executors, in a local master and in a local cluster."""

    @classmethod
    def setUpClass(cls):
        """Puts a folder on the PYTHONPATH before the JVM starts."""
        cls.folder = tempfile.TemporaryDirectory()
        (pathlib.Path(cls.folder.name) / "of_the_node.py").write_text("NAME = 'here'\n")
        cls.before = os.environ["PYTHONPATH"]
        os.environ["PYTHONPATH"] = os.pathsep.join([cls.before, cls.folder.name])

    @classmethod
    def tearDownClass(cls):
        """Takes it off again."""
        os.environ["PYTHONPATH"] = cls.before
        cls.folder.cleanup()

    def found(self, master):
        """Runs one task, which imports the module."""

        def look(_rows):
            import sys

            import of_the_node

            yield of_the_node.NAME, sys.path

        context = SparkContext(master, "paths")
        try:
            ((name, path),) = context.parallelize([1], 1).mapPartitions(look).collect()
        finally:
            context.stop()
        assert name == "here"
        assert set(os.environ["PYTHONPATH"].split(os.pathsep)) <= set(path), path

    def test_local(self):
        """In the driver's own JVM."""
        self.found("local[1]")

    def test_local_cluster(self):
        """In an executor's."""
        self.found("local-cluster[1,1,1024]")
