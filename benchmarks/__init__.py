"""Where the README's figures come from: ``make bench NAME=loop``, and see benchmarks/README.md."""
