"""What runs in the workers of other queues: their settings, their tasks, and the work that these do."""
