// Package chaos kills, freezes and restarts the real agent under a storm of
// connects, in every mode and under every whenDown that it has; with STARVE=1 it
// starves it as well, which no mode passes yet. A run is one mode under one
// whenDown, struck by each blow in turn, or one mode's loop of restarts; each has
// 10,000 connects at least, with FULL=1 ten times as many. Run it with `make chaos`.
package chaos
