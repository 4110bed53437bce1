# ruff: noqa: F401, F403
"""Names for the driver scripts that tests start: `from support.script_prelude import *`."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

import stagecrew
from support.clusters import *
from support.journal import *
from support.processes import *
from support.sessions import *
from support.waiting import *
