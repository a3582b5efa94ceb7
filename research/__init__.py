"""Inference, measurement, results and reports."""
