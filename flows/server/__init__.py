"""The Prefect servers that trialflow starts: for one run, or for `trialflow up`.

- `embedded_server` serves one run where no server is configured; `up_server` serves `trialflow up`.
- Both start `prefect_server`, which runs `server_script` in a `child_process`.
- `request_guard` keeps other sites' pages out of a server; `server_login` lets its user in.
- `server_restarts` starts an embedded server again that was killed.
- `child_process` starts processes that end when their parent ends.
- `prefect_settings` has the settings of Prefect for a run on a terminal.
"""
