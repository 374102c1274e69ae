"""Any pipeline schedule on CPU processes: graphs of chunks, a transport, one process a stage ([plan_executor.md])."""
