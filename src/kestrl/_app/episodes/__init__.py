"""What the commands `kestrl episodes` show: selections, single episodes, differences and labels."""
