"""Measures the README's figures: ``make bench NAME=loop``; see benchmarks/README.md."""
