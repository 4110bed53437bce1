"""Runs one module of PySpark's tests, and writes JSON lines: `one_module.py MODULE RESULTS [TEST...]`.

A line is written before and after each test, so that a test that never ends is also known.
"""

import json
import sys
import unittest


class Recorder(unittest.TextTestResult):
    """Records the outcome of each test. A test with a failed subtest has failed."""

    def __init__(self, *args, out, **kwargs):
        super().__init__(*args, **kwargs)
        self._out = out
        self._ended = {}

    def _write(self, test, outcome, why=""):
        self._out.write(json.dumps({"test": test.id(), "outcome": outcome, "why": why[-4000:]}) + "\n")
        self._out.flush()

    def startTest(self, test):
        super().startTest(test)
        self._ended[test.id()] = ("passed", "")
        self._write(test, "running")

    def _note(self, test, outcome, error=None):
        why = self._exc_info_to_string(error, test) if error else ""
        if test.id() in self._ended:
            self._ended[test.id()] = (outcome, why)
        else:  # setUpClass and similar, which have no startTest
            self._write(test, outcome, why)

    def addError(self, test, err):
        super().addError(test, err)
        self._note(test, "failed", err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._note(test, "failed", err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, "skipped")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self._note(test, "failed as expected")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._note(test, "failed")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(test, "failed", err)

    def stopTest(self, test):
        super().stopTest(test)
        outcome, why = self._ended.pop(test.id())
        self._write(test, outcome, why)


def main():
    """Runs all tests of the module, or only the tests that the arguments name."""
    module, results, *names = sys.argv[1:]
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(names) if names else loader.loadTestsFromName(module)
    with open(results, "w", encoding="utf-8") as out:
        runner = unittest.TextTestRunner(
            verbosity=2, resultclass=lambda *args, **kwargs: Recorder(*args, out=out, **kwargs)
        )
        runner.run(suite)
        out.write(json.dumps({"test": "", "outcome": "end", "why": ""}) + "\n")


if __name__ == "__main__":
    main()
