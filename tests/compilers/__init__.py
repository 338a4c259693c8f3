"""Detectors of compiler faults."""
