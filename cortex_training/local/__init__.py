"""The local service: the Cortex Training REST API on this machine, really training with torch on its CPU.

`server` listens, `app` reads HTTP, `service` owns jobs and checkpoints, `operations` runs what is asked of a running
job, and `engine` is the only part that imports torch, which it does when the first job initialises.
"""
