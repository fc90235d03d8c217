"""What `manage.py advisory_lock` does, one module for each of its subcommands."""
