"""`kestrl push`: a follower of what a run stores, which sends it to experiment trackers and to data sets."""
