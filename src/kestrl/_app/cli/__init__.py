"""`kestrl`: the command line. Thin: every command calls the library and prints."""
