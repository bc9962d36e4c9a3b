"""Real mail: sources, parser, database, tools and questions. The synthetic demo is `kestrl_email.world`."""
