"""What starts runs: the command line, deployments, work pools."""
