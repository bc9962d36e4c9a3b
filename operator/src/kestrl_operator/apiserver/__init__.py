"""The connection to the API server: typed calls, log-in, and the Lease that elects the writer."""
