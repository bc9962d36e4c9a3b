"""The page `kestrl ui`: the runs, steps and episodes of a place as HTML, rendered from storage at each request."""
