"""What `manage.py demo` shows: real processes that compete, what they logged, and whether the claims hold."""
