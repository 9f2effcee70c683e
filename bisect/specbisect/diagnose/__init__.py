"""Why a case departs: cause by intervention, each label earned by an experiment that is kept as evidence."""
