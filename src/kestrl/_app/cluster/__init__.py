"""Jobs on a cluster, as `kestrl -n NAMESPACE` and `kubectl kestrl` show them."""
