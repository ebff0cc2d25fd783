"""Property tests have no time limits: a host that is busy with other tests may hold each step of them up for seconds."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
