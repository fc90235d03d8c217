"""An engine derived from Django's, as PostGIS and many third-party ones are, and work for processes of their own."""
