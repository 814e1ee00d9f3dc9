"""Experiments of the seeds on the project's own runners: when a persistent batch pays, and what a step costs."""
