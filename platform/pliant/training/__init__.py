"""Runs a job: the driver's side in `launch`, the workers' side in `worker`, `loop` and `engine`."""
