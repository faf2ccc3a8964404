"""What is known of peers and links: estimators, and links from the few that were measured."""
