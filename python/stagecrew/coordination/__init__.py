"""Operator coordinators: Python objects on the driver that exchange events with running tasks."""
