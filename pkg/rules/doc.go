// Package rules says WHAT is diverted: the model, its strict parser, the
// reference Match, and renderers to what each mode installs. It is pure: it
// touches neither kernel nor network, but for resolving names.
package rules
