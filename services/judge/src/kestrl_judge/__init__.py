"""KestRL's judge: scores groups, and never turns its own failure into a reward.

`servicer` is the wire, `scoring` combines what the components of the reward say (and has the seam for judges of other kinds),
`rules` scores by plain functions, each in processes of its own (`process`), in which `worker` runs.
"""
