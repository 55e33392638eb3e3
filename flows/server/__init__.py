"""The Prefect servers that trialflow starts: for one run, or for `trialflow up`.

- `embedded_server` serves one run where no server is configured.
- `prefect_server` runs `server_script`, for it and for `trialflow up`, and starts it again.
- `request_guard` keeps other sites' pages out of a server; `server_login` lets its user in.
- `prefect_settings` has the settings of Prefect for a run on a terminal.
"""
