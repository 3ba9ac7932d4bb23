"""What a person runs: ingest, verify, inspect (training, plan and report follow)."""

__version__ = "0.1.0"
