"""Worlds with known answers. Importing this package makes them known to Gymnasium by name."""

from koffline.envs.gymnasium_worlds import register_envs

register_envs()
