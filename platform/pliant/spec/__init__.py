"""The job spec: what a user asks for, in one YAML file."""

from pliant.spec.job import JobSpec
from pliant.spec.load import load_spec

__all__ = ["JobSpec", "load_spec"]
