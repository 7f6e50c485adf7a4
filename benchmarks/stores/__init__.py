"""Real S3 stores on loopback, of which two answer in ways that no client expects (row 11 of the faults).

| store | what it is | how it differs from S3 |
| --- | --- | --- |
| swift | OpenStack's object store, with its S3 front | it doesn't |
| rclone | `rclone serve s3` | a range comes with status 200; If-Match is ignored |
| s3rver | a server for tests, in JavaScript | If-Match is ignored |

`make faults` installs them into .venv-stores; nothing of streamload runs in that environment.
"""
