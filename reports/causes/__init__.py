"""From red records to what causes them: findings, each with the features of a case that it needs."""
