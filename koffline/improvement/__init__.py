"""From a log to a better policy with a certificate: `koffline.improve`."""
