"""Start a run: graphs of a job, processes of one host or several, hostfiles, affinity.

`job` trains; `host_processes` watches one host's processes, `multi_host` and `host_agent` those of several; `rank` is
what each process runs; `affinity` chooses its cores, `binding` binds it and notices changes; `sharded_run` is `run-sharded`.

May import train, interop and what is below them. Begin with `job.py`.
"""
