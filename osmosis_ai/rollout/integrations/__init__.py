"""Agent frameworks in workflow rollouts. Each needs its extra of `osmosis-ai`, so import its own module."""
