"""What follows the workers' steps and sequences: metrics, spans, the step log, watches."""
