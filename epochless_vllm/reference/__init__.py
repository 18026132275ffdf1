"""Independent slow truth for the sampler and the model; shares no arithmetic with the serving wing."""
