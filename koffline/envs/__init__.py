"""Worlds with known answers. Importing this package makes them known to Gymnasium by name."""

from koffline.envs.registration import register_envs

register_envs()
