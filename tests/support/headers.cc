// SPDX-License-Identifier: Apache-2.0
//
// Nothing but a place for the precompiled headers of the tests.
int main() {}
