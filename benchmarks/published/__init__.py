"""cm.predict held against the times that tokamax publishes."""
