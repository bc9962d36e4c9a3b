"""KestRL's judge: scores groups, and never turns its own failure into a reward.

`servicer` has the gRPC service, `scoring` combines the components of the reward and defines their interface. `rules`
scores with plain functions, each in its own processes (`process`), which run `worker`; `ruler` with judge models.
"""
