"""Delayed batching: when a model should wait until more requests are ready, and what that is worth.

Pure functions over a description of the models (`network.Network`). Three entries for those who use them:

    plan.plan(network, concurrency)             thresholds per model and number of active requests, with predictions
    launch.clamp(thresholds, active)            the nearest thresholds that cannot deadlock
    launch.reason(...), launch.stranded(...)    whether to launch now, and why
"""
