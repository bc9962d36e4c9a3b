"""The program `kestrl`: its commands, the local runner and generators of tasks. Private."""
