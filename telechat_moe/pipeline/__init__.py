"""Run any pipeline schedule on CPU processes: graphs of chunks, a transport, one process a stage.

`schedule`, `chunks` and `spec` say what to run and need no MindSpore; `cells`, `deferred` and `stage` compute;
`worker` is the process of a stage, `run` starts and watches all of them.

May import model and what is below it. Begin with `run.py`.
"""
