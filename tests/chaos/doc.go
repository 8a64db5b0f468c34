// Package chaos kills and freezes the real agent under a storm of connects, in
// every mode and under every whenDown that it has. Run it with `make chaos`.
package chaos
